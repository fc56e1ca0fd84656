"""The two ways in which a stage ends early on purpose; `common.cli` prints them and sets the exit code."""


class StageError(Exception):
    """The stage failed at run time: a server, a disk, a check. The message is what the user reads."""

    exit_code = 1


class InputError(StageError):
    """Usage or bad input: nothing was written; the message names the file, row, tensor or flag."""

    exit_code = 2
