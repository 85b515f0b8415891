"""What people read of an evaluation: the table, the page, its charts, decoded text token by token."""
