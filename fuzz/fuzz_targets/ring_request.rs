#![no_main]

shoal_fuzz::target!("ring_request");
