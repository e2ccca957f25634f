"""Messages to tokens and back: chat templates, histories that are bridged, completions that are read."""
