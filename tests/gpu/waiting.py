"""Finds operations that make the host wait for the GPU."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def no_waiting():
    """Have every operation raise RuntimeError that waits for all the GPU still has to do; an event's wait may pass."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
