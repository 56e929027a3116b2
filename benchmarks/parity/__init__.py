"""One loss curve under every strategy: the language-model example, with one word changed."""
