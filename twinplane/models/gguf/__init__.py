"""From a .gguf file to a Hugging Face folder: config.json, safetensors, tokenizer files."""
