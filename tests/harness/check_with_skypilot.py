"""Run by a Python that has SkyPilot: its schemas take the task file, its parser the commands on
standard input (a JSON list of argument lists). Nothing is launched and no server is asked.
"""

import json
import sys

import click
import yaml
from sky.client.cli import command
from sky.utils import common_utils, schemas

with open(sys.argv[1]) as file:
    task = yaml.safe_load(file)
common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "resources: ")
for arguments in json.load(sys.stdin):
    name = arguments[0]
    rest = list(arguments[1:])
    command.cli.commands[name].make_context(name, rest)
refused = False
try:
    command.cli.commands["launch"].make_context("launch", ["--no-such-option"])
except click.exceptions.NoSuchOption:
    refused = True
assert refused, "the parser takes everything"
