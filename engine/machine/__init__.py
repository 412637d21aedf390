"""What this process has of the machine: threads, mapped files, and its rank among processes.

Knows the operating system and environment variables; knows no model and no request.
"""
