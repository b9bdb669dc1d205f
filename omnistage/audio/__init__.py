"""Sound: PCM, containers, sentences to speak, and a model of the listener.  Imports no torch."""
