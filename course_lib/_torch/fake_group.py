"""The process group "fake", whose collectives return at once without communicating.

Importing this module registers the group. The module is imported only where it is used.
"""

from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
