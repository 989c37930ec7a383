"""The command line of training: composing the configuration, help, synonyms, open_clip's flags."""
