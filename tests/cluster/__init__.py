# Tests over several emulated hosts.
