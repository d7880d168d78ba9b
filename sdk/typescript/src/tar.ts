/** A tar stream of files, by name. */
export function tar(files: Record<string, Uint8Array>): Uint8Array {
  const parts: Uint8Array[] = [];
  for (const [name, data] of Object.entries(files)) {
    const encoded = new TextEncoder().encode(name);
    if (encoded.length > 100) throw new RangeError(`the name of a recipe's file is too long: ${name}`);
    const head = new Uint8Array(512);
    const put = (at: number, text: string): void => head.set(new TextEncoder().encode(text), at);
    const octal = (value: number, width: number): string => value.toString(8).padStart(width - 1, "0") + "\0";
    head.set(encoded, 0);
    put(100, octal(0o644, 8));
    put(108, octal(0, 8));
    put(116, octal(0, 8));
    put(124, octal(data.length, 12));
    put(136, octal(0, 12));
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    put(148, octal(head.reduce((sum, b) => sum + b, 0), 7) + " ");
    parts.push(head, data, new Uint8Array((512 - (data.length % 512)) % 512));
  }
  parts.push(new Uint8Array(1024));
  const whole = new Uint8Array(parts.reduce((sum, p) => sum + p.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
