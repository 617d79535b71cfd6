"""Black box: a file for each process that says, after it was killed or while it hangs, what it was doing."""
