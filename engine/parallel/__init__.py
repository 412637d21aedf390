"""One target in shards on several processes: the process group, and passes that all ranks run together.

Rank 0 has the requests; the other ranks run the passes that it broadcasts. This package knows no sampling and no text.
"""
