"""`kvrelay demo`: real chats over the emulated WAN, each answer compared with one engine's. Begin with command.py."""
