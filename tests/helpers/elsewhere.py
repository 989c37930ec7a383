"""helpers.elsewhere MODULE …, as a started command: `python -m MODULE …` of the checkout that is the working folder.

It has the imports of the packages that we use, and reads our own modules anew.
"""

import os
import runpy
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "dyad"]:
    del sys.modules[name]
sys.path.insert(0, os.getcwd())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
