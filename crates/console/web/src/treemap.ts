// Divides a rectangle among items by their sizes, into rectangles that are as square as possible
// (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000).

export interface Rectangle {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** The rectangle of each size, in percent of the whole. Sizes are in descending order. */
export function squarify(sizes: number[], aspect: number): Rectangle[] {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  if (total <= 0) {
    return sizes.map(() => ({ x: 0, y: 0, width: 0, height: 0 }));
  }
  // In units in which the whole is `aspect` wide and 1 high.
  const areas = sizes.map((size) => (size / total) * aspect);
  const free: Rectangle = { x: 0, y: 0, width: aspect, height: 1 };
  const placed: Rectangle[] = [];
  let start = 0;
  while (start < areas.length) {
    const side = Math.min(free.width, free.height);
    let end = start + 1;
    while (end < areas.length && worst(areas.slice(start, end + 1), side) <= worst(areas.slice(start, end), side)) {
      end += 1;
    }
    place(areas.slice(start, end), free, placed);
    start = end;
  }
  return placed.map(({ x, y, width, height }) => ({
    x: (x / aspect) * 100,
    y: y * 100,
    width: (width / aspect) * 100,
    height: height * 100,
  }));
}

/** The worst aspect ratio of a row of areas along a side. */
function worst(row: number[], side: number): number {
  const sum = row.reduce((total, area) => total + area, 0);
  const thickness = sum / side;
  return Math.max(...row.map((area) => Math.max((thickness * thickness) / area, area / (thickness * thickness))));
}

/** Places a row along the shorter side, and takes it off the free rectangle. */
function place(row: number[], free: Rectangle, placed: Rectangle[]): void {
  const sum = row.reduce((total, area) => total + area, 0);
  const isColumn = free.width >= free.height;
  const side = isColumn ? free.height : free.width;
  const thickness = side > 0 ? sum / side : 0;
  let at = 0;
  for (const area of row) {
    const length = thickness > 0 ? area / thickness : 0;
    placed.push(
      isColumn
        ? { x: free.x, y: free.y + at, width: thickness, height: length }
        : { x: free.x + at, y: free.y, width: length, height: thickness },
    );
    at += length;
  }
  if (isColumn) {
    free.x += thickness;
    free.width -= thickness;
  } else {
    free.y += thickness;
    free.height -= thickness;
  }
}
