"""A program in the place of an environment's interpreter: it answers the bridge's lines without verifiers.

Told so by the reply that it is to score it ends, hangs, or answers with what is no line. Where it hangs once, its id
and that of a process that it has started stand in FOLDER/hangs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])

starts = FOLDER / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
print("started", file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"], "infinite": False, "pid": os.getpid()}
    if request["do"] == "tasks":
        span = range(request["start"], min(request["stop"], 1200))
        answer["tasks"] = [
            {
                "key": str(index),
                "messages": [{"role": "user", "content": f"q{index}"}],
                "data": {"answer": index},
                "tools": False,
                "container": False,
            }
            for index in span
        ]
    if request["do"] == "score":
        reply = request.get("reply") or request["messages"][-1]["content"]
        if reply == "die" or (reply == "die once" and starts.read_text() == "x"):
            os.kill(os.getpid(), signal.SIGKILL)
        if reply == "hang once" and starts.read_text() == "x":
            child = subprocess.Popen(["sleep", "100000"], stdout=sys.stderr)
            (FOLDER / "hangs").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if reply == "hang":
            time.sleep(600)
        if reply == "babble":
            print("no JSON", flush=True)
            continue
        answer["reward"] = float(reply == str(request["index"]))
    print(json.dumps(answer), flush=True)
