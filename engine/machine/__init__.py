"""The machine resources of this process: threads, mapped files, and its rank."""
