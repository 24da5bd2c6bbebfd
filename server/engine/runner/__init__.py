"""Loads the model and executes steps on the device."""
