"""What binds an application beside its class: callbacks, causes of errors, keys, poisonous messages."""
