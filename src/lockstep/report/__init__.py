"""What a run has recorded, as one page of HTML. Only files are read; torch is not imported."""
