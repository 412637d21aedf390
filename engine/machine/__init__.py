"""The machine resources of this process: threads, mapped files, a cache folder, and its rank among processes.

This package knows the operating system and environment variables, and no model and no request.
"""
