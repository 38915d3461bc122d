"""Every decoder under a coverage-guided fuzzer (`make fuzz`), and what it has found, for ever."""
