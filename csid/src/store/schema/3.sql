-- Nothing looks for mounts by their volume but rarely, and each mount and unmount wrote the index's page.
DROP INDEX mounts_of_volume;
