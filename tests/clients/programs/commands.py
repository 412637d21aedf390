"""A command of this environment, run once for each list of arguments: in one process, for its imports take long."""

import json
import sys
from importlib.metadata import entry_points

if __name__ == "__main__":  # its own processes import this module again
    name, runs = sys.argv[1], json.loads(sys.argv[2])
    [command] = entry_points(group="console_scripts", name=name)
    main = command.load()
    for arguments in runs:
        sys.argv = [name, *arguments]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
