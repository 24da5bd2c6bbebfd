"""Detects operations that synchronize with the GPU."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def forbid_synchronization():
    """Make synchronizing operations raise RuntimeError; waiting for an event may go undetected."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
