"""Units of a service manager that run the processes of one host."""
