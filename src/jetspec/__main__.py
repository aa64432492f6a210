"""`python -m jetspec` is the command `jetspec`."""

from __future__ import annotations

import contextlib
import os
import sys

from jetspec.cli.main import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # started by a launcher: the threads of torch's process groups now and then
        for stream in (sys.stdout, sys.stderr):  # abort an interpreter that is about to end
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
