"""A process that prepares caches in forked children, so that a case costs no imports.

It reads one JSON request a line and answers with one JSON line: exit code of the child (negative:
the signal that ended it), seconds, peak memory. It never encodes anything itself, so that no
native thread exists when it forks.

Request: data, model (sections), pace (fields of Pace), failpoints, kill_after_seconds, hub (rows
of every hub data set).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from atoll.config.data import DataConfig
from atoll.config.model import ModelConfig
from atoll.data.hub import HubRows
from atoll.data.pace import Pace
from atoll.data.prepare import Outside, prepare
from atoll.errors import AtollError
from atoll.faults import arm


def work(request: dict) -> int:
    """Prepare as asked and return the exit code that the command line would give."""
    arm(request.get("failpoints", ""))
    rows = request.get("hub", [])
    outside = Outside(open_hub=lambda source, skip: HubRows("c0ffee", iter(rows[skip:])))
    try:
        prepare(
            DataConfig.model_validate(request["data"]),
            ModelConfig.model_validate(request["model"]),
            pace=Pace(**request.get("pace", {})),
            outside=outside,
        )
    except AtollError as error:
        return error.exit_code
    return 0


def serve() -> None:
    import tokenizers  # noqa: F401 - imported here once, used in the children

    for line in sys.stdin:
        request = json.loads(line)
        request["data"]["cache_dir"] = Path(request["data"]["cache_dir"])
        started = time.perf_counter()
        child = os.fork()
        if not child:
            os._exit(work(request))
        if "kill_after_seconds" in request:
            time.sleep(request["kill_after_seconds"])
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.perf_counter() - started,
            "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
