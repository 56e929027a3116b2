"""Stand-ins for compiled operators, before anything imports torchvision."""

import stubs as stubs
