"""What serving engines make of the folders that layouts write."""
