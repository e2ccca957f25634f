"""The engine link: how a policy that another process serves is asked, from both ends."""
