#![no_main]

shoal_fuzz::target!("frame_header");
