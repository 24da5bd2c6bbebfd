"""Renders chat templates, programs of unknown origin, in processes that have hard limits and can be killed."""
