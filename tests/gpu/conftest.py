"""Tests that need a GPU; where there is none they are not collected."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
