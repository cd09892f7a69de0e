// What the console says of itself: its version, its addresses, and whether it offers changes.
export const session = {};
