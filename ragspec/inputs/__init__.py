"""Where records come from: files, archives and pipes, line by line."""
