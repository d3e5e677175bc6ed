"""The process group "fake", whose collectives return at once; imported only where it is used."""

from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
