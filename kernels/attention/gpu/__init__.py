"""Device code that the portable and the Hopper attention kernels share."""
