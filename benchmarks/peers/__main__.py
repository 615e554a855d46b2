"""Makes the environments of other engines, and SmolLM2 in the forms that they read: half an hour the first time.

make bench-peers
"""

import json
import sys

from peers import environments as env
from peers.pool import SMOLLM2

if __name__ == "__main__":
    try:
        print(json.dumps(env.prepare((SMOLLM2,)), indent=1))
    except env.CannotMakeError as error:
        sys.exit(str(error))
