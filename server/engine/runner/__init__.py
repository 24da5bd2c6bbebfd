"""Executes steps on the device, and starts the model."""
