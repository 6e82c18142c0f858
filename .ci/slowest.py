"""Print the ten slowest tests of all JUnit reports in a folder: setup, call and teardown together."""

import sys
from pathlib import Path
from xml.etree import ElementTree

cases = [
    case for report in Path(sys.argv[1]).glob("*.xml") for case in ElementTree.parse(report).iter("testcase")
]
seconds = sorted(
    ((float(c.attrib["time"]), c.attrib["classname"], c.attrib["name"]) for c in cases), reverse=True
)
print(f"{len(cases)} tests took {sum(s for s, _, _ in seconds):.0f} s, added up; the ten slowest:")
print(f"{'seconds':>9}  test")
for s, module, name in seconds[:10]:
    print(f"{s:9.1f}  {module.replace('.', '/')}.py::{name}")
