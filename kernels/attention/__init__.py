"""The attention kernels, one file each, reached only through the door in `kernels/__init__.py`."""
