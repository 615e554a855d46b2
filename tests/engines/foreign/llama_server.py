"""`specdecpp serve` with the reference pair, under the options of llama-server that llama.cpp's tests give."""

import argparse
import sys

from specdecpp.cli import main

parser = argparse.ArgumentParser()
for name in ("--host", "--port", "--model-draft", "--n-predict", "--parallel", "--spec-draft-n-min", "--spec-draft-n-max"):
    parser.add_argument(name)
given, _ = parser.parse_known_args()
lengths = f"min_tokens={given.spec_draft_n_min or 0},max_tokens={given.spec_draft_n_max or 8}"
sys.argv[1:] = [
    *("serve", "--target", "reference", "--host", given.host, "--port", given.port, "--max-tokens", given.n_predict),
    *("--max-running", given.parallel or "1", "--policy", f"cumulative:0.2,{lengths}" if given.model_draft else "none"),
]
main()
