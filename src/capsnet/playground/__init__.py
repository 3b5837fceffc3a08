"""The playground: an engine that looks inside trained networks, and the page that shows it."""
