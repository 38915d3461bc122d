"""What a run of thousands of accelerators would cost this pipeline: `dora-pipe sim scale`."""
