"""The machine resources of this process: threads, mapped files, a cache folder, and its rank among processes."""
