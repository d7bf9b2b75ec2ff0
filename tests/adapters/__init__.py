# This registers the modules of the contract with pytest, which has to come before any of them is imported.
from zckpt.testing import EngineContract as EngineContract
