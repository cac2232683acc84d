#![no_main]

shoal_fuzz::target!("tensor_header");
