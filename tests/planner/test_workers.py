"""Dry runs in other processes."""

import subprocess
import sys


def test_a_class_of_the_script_is_not_sent_to_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from functools import partial\n"
        "from fourfold.planner.workers import for_all\n"
        "class Model: pass\n"
        "def task(model, layout): return type(model).__name__\n"
        "print(list(for_all(partial(task, Model()), range(9))) == ['Model'] * 9)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
