"""The same numbers, whatever the model: many kinds of models under every strategy, against loops by hand."""
