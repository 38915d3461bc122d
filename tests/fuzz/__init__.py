"""Coverage-guided fuzzing of every decoder (`make fuzz`), and the corpus of its findings."""
